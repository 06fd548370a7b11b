from types import SimpleNamespace

import numpy as np
import pytest

from colibri_cli.tokenizer import Word
from colibri_cli.words import word_answers


def inference(probabilities: list[list[float]], experts: list[list[tuple[int, float]]]) -> SimpleNamespace:
    shares = np.array(probabilities, np.float32)
    return SimpleNamespace(
        probabilities=shares,
        classes=shares.argmax(axis=1).astype(np.int32),
        routing=SimpleNamespace(
            expert_ids=np.array([[i for i, _ in row] for row in experts], np.int32),
            expert_weights=np.array([[w for _, w in row] for row in experts], np.float32),
        ),
    )


def test_one_piece_keeps_its_values_to_the_last_bit():
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(5), 300).astype(np.float32)
    found = inference(shares.tolist(), [[(3, 0.7), (1, 0.3)]] * 300)
    answers = list(word_answers(found, [Word("x", i, i + 1) for i in range(300)]))
    assert [answer.label for answer in answers] == shares.argmax(axis=1).tolist()
    assert np.array_equal(np.stack([answer.probabilities for answer in answers]), shares)
    assert answers[0].experts == [(3, np.float32(0.7)), (1, np.float32(0.3))]


def test_a_word_of_several_pieces_sums_log_probabilities():
    # By the pieces' own votes class 0 wins two to one; by the sum of logs class 1 does.
    found = inference([[0.5, 0.4, 0.1], [0.5, 0.4, 0.1], [0.1, 0.7, 0.2]], [[(0, 1.0)]] * 3)
    (answer,) = word_answers(found, [Word("abc", 0, 3)])
    products = np.array([0.5 * 0.5 * 0.1, 0.4 * 0.4 * 0.7, 0.1 * 0.1 * 0.2])
    assert answer.label == 1
    assert answer.probabilities.dtype == np.float32
    assert answer.probabilities == pytest.approx(products / products.sum(), rel=1e-6)


def test_expert_weights_are_means_over_the_pieces():
    found = inference([[1.0]] * 3, [[(2, 0.75), (5, 0.25)], [(5, 0.5), (2, 0.5)], [(7, 1.0), (0, 0.0)]])
    one, two = word_answers(found, [Word("ab", 0, 2), Word("c", 2, 3)])
    assert one.experts == [(2, np.float32(0.625)), (5, np.float32(0.375))]
    assert two.experts == [(7, np.float32(1)), (0, np.float32(0))]


def test_equal_weights_go_by_the_lower_expert():
    found = inference([[1.0]], [[(6, 0.5), (4, 0.5)]])
    (answer,) = word_answers(found, [Word("a", 0, 1)])
    assert [expert for expert, _ in answer.experts] == [4, 6]


def test_a_certain_piece_does_not_make_the_word_undefined():
    found = inference([[1.0, 0.0], [0.0, 1.0], [0.4, 0.6]], [[(0, 1.0)]] * 3)
    (answer,) = word_answers(found, [Word("abc", 0, 3)])
    assert answer.label == 1
    assert answer.probabilities == pytest.approx([0.4, 0.6])


def test_many_words_and_none():
    n = 10_000
    found = inference([[0.25, 0.75]] * n, [[(i % 8, 1.0)] for i in range(n)])
    words = [Word(str(i), i, i + 2) for i in range(0, n, 2)]
    answers = list(word_answers(found, words))
    assert [answer.word for answer in answers] == words
    assert [answer.experts[0][0] for answer in answers[:4]] == [0, 2, 4, 6]
    assert list(word_answers(found, [])) == []
