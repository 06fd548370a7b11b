"""Write the fixture files beside this script. Run once, with torch 2.13 and safetensors installed.

`full` has float32 weights of full precision; `coarse` has weights that float16 and bfloat16 hold exactly.
`full.npy` and `coarse.npy` are what every other file must read as.
"""

from pathlib import Path

import numpy as np
import safetensors.torch
import torch

HERE = Path(__file__).parent
N_EXPERTS, HIDDEN = 8, 32

torch.manual_seed(20)
full64 = torch.randn(N_EXPERTS, HIDDEN, dtype=torch.float64) / 8
full64[0, :4] = torch.tensor([0.0, -0.0, 1e-45, 3.4028234663852886e38], dtype=torch.float64)
full = full64.float()
coarse = torch.randint(-127, 128, (N_EXPERTS, HIDDEN)).float() / 128
np.save(HERE / "full.npy", full.numpy())
np.save(HERE / "coarse.npy", coarse.numpy())


def save(name: str, content: object, **options: object) -> None:
    torch.save(content, HERE / name, **options)


class Classifier(torch.nn.Module):
    """What a gate lives in: other matrices, biases and counters around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, HIDDEN)
        self.gate = torch.nn.Linear(HIDDEN, N_EXPERTS)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        self.gate.weight.data.copy_(full)


model = Classifier()
old = {"_use_new_zipfile_serialization": False}

save("tensor.pt", full)
save("tensor_legacy.pth", full, **old)
save("parameter.pt", torch.nn.Parameter(full))
save("float64.pt", full64)
save("float16.pt", coarse.half())
save("bfloat16.pt", coarse.bfloat16())
save("bfloat16_legacy.pt", coarse.bfloat16(), **old)
save("state_dict.pt", model.state_dict())
save("state_dict_legacy.pt", model.state_dict(), **old)
save("nested.pt", {"epoch": 3, "model": {"router": [full, None]}, "loss": [0.5, 0.25]})
save("transposed_view.pt", full.T.contiguous().T)
save("slice_of_stack.pt", torch.stack([coarse, full, coarse])[1])
save("every_other_column.pt", torch.stack([full, coarse], dim=2).reshape(N_EXPERTS, 2 * HIDDEN)[:, ::2])
save("pickle_protocol_4.pt", {"gate": full}, pickle_protocol=4)
save("new_dtypes.pt", {"fp8": coarse.to(torch.float8_e4m3fn), "u16": coarse.to(torch.uint16), "gate": full})
save("two_gates.pt", {"layers.0.gate.weight": full, "layers.1.gate.weight": coarse})
save("transposed.pt", full.T.contiguous())
save("whole_module.pt", torch.nn.Linear(HIDDEN, N_EXPERTS))
save("integers.pt", torch.arange(N_EXPERTS * HIDDEN).reshape(N_EXPERTS, HIDDEN))
torch.serialization.set_crc32_options(False)
save("no_checksums.pt", full)

safetensors.torch.save_file({"gate": full, "bias": coarse[:, 0].clone()}, HERE / "float32.safetensors")
safetensors.torch.save_file({"gate": full64}, HERE / "float64.safetensors", metadata={"format": "pt"})
safetensors.torch.save_file({"gate": coarse.half()}, HERE / "float16.safetensors")
safetensors.torch.save_file({"gate": coarse.bfloat16()}, HERE / "bfloat16.safetensors")

np.save(HERE / "float64.npy", full64.numpy())
np.save(HERE / "fortran_order.npy", np.asfortranarray(full.numpy()))
np.save(HERE / "big_endian.npy", full.numpy().astype(">f4"))
np.save(HERE / "float16.npy", coarse.half().numpy())
np.savez(HERE / "stored.npz", gate=full.numpy(), bias=coarse[:, 0].numpy())
np.savez_compressed(HERE / "compressed.npz", gate=full.numpy(), ids=np.arange(5))

full.numpy().tofile(HERE / "raw.bin")
full.T.contiguous().numpy().tofile(HERE / "raw_transposed.bin")
