from colibri_cli.infer_report import Latency, load_table


def test_load_is_drawn_against_the_busiest_expert():
    lines = load_table([30, 0, 15], terminal=False).splitlines()
    assert lines[1].split() == ["0", "30", "0.667", "█" * 40]
    assert lines[2].split() == ["1", "0", "0.000"]
    assert lines[3].split() == ["2", "15", "0.333", "█" * 20]
    assert load_table([0, 0], terminal=False).splitlines()[1].split() == ["0", "0", "0.000"]


def test_percentiles_are_times_that_were_measured():
    latency = Latency([float(i) for i in range(100, 0, -1)])
    assert latency.percentile(50) == 50
    assert latency.percentile(99) == 99
    assert Latency([3.0, 1.0]).percentile(50) == 1
    assert Latency([3.0, 1.0]).percentile(99) == 3
