"""A step's numbers on their way to the device: rows of sequences, layout, padding, graphs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import LAST_SAMPLED, Row
from engine.execution.cuda_graphs import DecodeGraphs, GraphKey, PlainReplay, token_sizes
from engine.kernels.sequence_rows import SequenceRows
from engine.kernels.step import LoraRows, StepBuffer, host_step
from engine.protocol import SamplingParams

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
CPU = torch.device("cpu")


def row(seq: int, tokens: list[int], start: int, blocks: list[int], sample: bool = True) -> Row:
    return Row(seq, tokens, start, blocks, None, sample, GREEDY, 0, [], 0)


@settings(max_examples=60)
@given(data=st.data())
def test_the_devices_table_holds_every_running_sequence(data: st.DataObject) -> None:
    """Also when block lists grow, shrink or change, and when sequences outnumber the rows."""
    rows = SequenceRows(4)
    table = np.full((4, 8), -1)
    blocks: dict[int, list[int]] = {}
    versions: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        running = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True))
        for seq in running:
            before = blocks.get(seq, [])
            kept = before[: data.draw(st.integers(0, 5))]
            blocks[seq] = kept + data.draw(st.lists(st.integers(0, 50), max_size=3))
            if blocks[seq][: len(before)] != before:
                versions[seq] = versions.get(seq, 0) + 1
        step = [
            replace(row(seq, [1], 0, blocks[seq]), table_version=versions.get(seq, 0))
            for seq in running
        ]
        sequence_rows, changes = rows.assign(step)
        assert len(set(sequence_rows)) == len(sequence_rows)
        for assign, column, block in changes:
            table[assign, column] = block
        for seq, assign in zip(running, sequence_rows, strict=True):
            assert table[assign, : len(blocks[seq])].tolist() == blocks[seq]
        if data.draw(st.booleans()):
            rows.forget(running[0])


def test_a_decoding_sequence_sends_only_its_new_block() -> None:
    rows = SequenceRows(2)
    assert len(rows.assign([row(7, [1], 0, [3, 4])])[1]) == 2
    assert rows.assign([row(7, [1], 0, [3, 4])])[1] == []
    assert rows.assign([row(7, [1], 0, [3, 4, 9])])[1] == [(0, 2, 9)]


def test_the_layout_of_a_mixed_step() -> None:
    decodes = [row(1, [LAST_SAMPLED], 17, [5, 2]), row(2, [8], 3, [6], sample=False)]
    prefills = [row(3, [10, 11, 12], 15, [9, 4])]
    step = host_step(decodes, prefills, [3, 0, 1], 16)
    assert step.tokens.tolist() == [-4, 8, 10, 11, 12]
    assert step.positions.tolist() == [17, 3, 15, 16, 17]
    assert step.slots.tolist() == [2 * 16 + 1, 6 * 16 + 3, 9 * 16 + 15, 4 * 16, 4 * 16 + 1]
    assert step.seq_lens.tolist() == [18, 4, 18]
    assert step.cu_q.tolist() == [0, 1, 2, 5]
    assert step.sampled.tolist() == [0, 4]
    assert step.sampled_rows.tolist() == [3, 1]
    sent = StepBuffer(16, 4, CPU).send(step, torch.zeros(4, 8), 2)
    assert sent.tokens.tolist() == step.tokens.tolist()
    assert sent.sampled_rows.tolist() == [3, 1]
    assert (sent.attention.decodes, sent.splits) == (2, 2)


def test_padding_writes_nothing_and_sees_nothing() -> None:
    step = host_step([row(1, [8], 3, [6])], [], [1], 16)
    lora = LoraRows(np.zeros(1, np.int32), np.array([[2, 0, 1]], np.int32), 16, 16)
    wide = DecodeGraphs(8, 4, PlainReplay).fit(replace(step, lora=lora), GraphKey(4, 2, 16))
    assert wide.slots.tolist() == [6 * 16 + 3, -1, -1, -1]
    assert wide.seq_lens.tolist() == [4, 0, 0, 0]
    assert wide.cu_q.tolist() == [0, 1, 1, 1, 1]
    assert wide.decodes == 4
    assert wide.lora is not None
    assert wide.lora.chunks.tolist() == [[2, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("most", [1, 3, 8, 64, 250])
def test_graph_sizes_reach_the_most_and_waste_little(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes))
    for tokens in range(9, most + 1):
        size = min(size for size in sizes if size >= tokens)
        assert size - tokens < max(8, tokens / 4)


def test_keys_round_up_and_end() -> None:
    graphs = DecodeGraphs(20, 6, PlainReplay)
    assert graphs.key(3, 0, 0) == GraphKey(4, 0)
    assert graphs.key(17, 3, 16) == GraphKey(20, 4, 16)
    assert graphs.key(2, 2, 16) == GraphKey(2, 2, 16)
    assert graphs.key(21, 0, 0) is None
    assert {
        graphs.key(n, min(n, a), 16 if a else 0) for n in range(1, 21) for a in range(7)
    } <= set(graphs.keys([16]))


def test_a_graph_reads_the_memory_it_was_recorded_with() -> None:
    graphs, buffer = DecodeGraphs(4, 2, PlainReplay), StepBuffer(8, 4, CPU)
    tables = torch.zeros(2, 2)
    seen = []
    for token in (5, 9):
        step = graphs.fit(host_step([row(1, [token], 0, [0])], [], [0], 16), GraphKey(2, 0))
        sent = buffer.send(step, tables, 1)
        seen.append(graphs.run(GraphKey(2, 0), sent, lambda s: s.tokens.clone()).tolist())
    assert seen == [[5, 0], [9, 0]]
    elsewhere = StepBuffer(8, 4, CPU).send(step, tables, 1)
    with pytest.raises(RuntimeError, match="memory moved"):
        graphs.run(GraphKey(2, 0), elsewhere, lambda s: s.tokens)
