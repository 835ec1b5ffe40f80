"""CUDA graphs of a rotation in place. Replays with new data, and streams, are tested with all families:
fe_api/lifecycle."""

import torch

from helpers import rotary


def test_replays_in_place_keep_turning(device):
    """Each replay turns what the last one left."""
    layout = rotary.TWO_PACKED._replace(in_place=True)
    x = rotary.draw(rotary.HALVES_FP32, layout, device)
    memory = rotary.arrange(x, layout)
    op = rotary.compiled(memory.inputs, memory.outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary.execute(op, memory.inputs, memory.outputs)
    for _ in range(3):
        before = memory.inputs.with_(x=memory.inputs.x.clone(), k=memory.inputs.k.clone())
        graph.replay()
        torch.cuda.synchronize()
        rotary.check(memory.outputs, before)
    memory.check()
