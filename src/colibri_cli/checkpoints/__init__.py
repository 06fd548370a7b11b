"""Published Hugging Face checkpoints of MoE models, read layer by layer.

A family of models is a row in `families`: its gate's options, its layers, the names of its tensors.
`checkpoint.open_model` finds the row from config.json, checks every tensor of every MoE layer from the files' headers
alone, and hands out one expert at a time in float32. Weights stay in the mapped files (`shards`) until then.
"""
