"""Colibri against its peers: one routed SwiGLU layer, the same work for all, in the same run.

`request` says what is asked for, `work` makes it: one file of random float32 weights a shape, mapped by everybody, and
tokens with their routing. Each *arm* (a peer, in one of its ways of holding weights) is a `worker`, a process that
imports its own peer alone; `workers` starts them, one weight type at a time, and outlives their crashes. `measure`
checks an arm's answer against float64, and then lets the arms take turns, round after round, one at a time, each
leaving its threads time to fall asleep. `limits` measures between turns what the machine can do at that moment.
`results` draws ratios and shares from the times; `report` and `plot` show them.
"""
