"""A step's numbers on their way to the device: rows of sequences, layout, padding, graphs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.gpu.adapters.lora_chunks import max_chunks, sort_into_chunks
from engine.backends.gpu.mixed import MixLimits
from engine.backends.gpu.sequence_rows import SequenceRows
from engine.backends.gpu.step import HostStep, LoraRows, StepBuffer, host_step
from engine.batch import LAST_SAMPLED, Row
from engine.config import EngineConfig
from engine.protocol import SamplingParams
from engine.runners.gpu.cuda_graphs import GraphKey, PlainReplay, StepGraphs, token_sizes

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
    wide = StepGraphs(8, 64, 4, PlainReplay).fit(replace(step, lora=lora), GraphKey(4, 2, 16))
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
    graphs = StepGraphs(20, 64, 6, PlainReplay)
    assert graphs.key(3, 0, 0) == GraphKey(4, 0)
    assert graphs.key(17, 3, 16) == GraphKey(20, 4, 16)
    assert graphs.key(2, 2, 16) == GraphKey(2, 2, 16)
    assert graphs.key(21, 0, 0) is None
    assert {
        graphs.key(n, min(n, a), 16 if a else 0) for n in range(1, 21) for a in range(7)
    } <= set(graphs.keys([16]))


def mixed_step(decodes: int, chunks: list[int], adapters: int = 0) -> HostStep:
    """Sequences of one token, then chunks of so many; their adapters take turns."""
    lengths = [1] * decodes + chunks
    rows = [row(n, [8] * length, 0, list(range(20))) for n, length in enumerate(lengths)]
    step = host_step(rows[:decodes], rows[decodes:], list(range(len(rows))), 16)
    if not adapters:
        return step
    slots = np.repeat(np.arange(len(rows)) % adapters, lengths)
    return replace(step, lora=LoraRows(*sort_into_chunks(slots, 16), 16, 16))


def test_padding_of_a_mixed_step_has_no_sequence() -> None:
    graphs, step = StepGraphs(4, 64, 4, PlainReplay), mixed_step(1, [3], 2)
    key = graphs.key_of(step)
    assert key == GraphKey(16, 4, 16, 4)
    wide = graphs.fit(step, key)
    assert wide.slots.tolist() == [0, 0, 1, 2] + [-1] * 12
    assert wide.seq_lens.tolist() == [1, 3, 0, 0]
    assert wide.cu_q.tolist() == [0, 1, 4, 4, 4]
    assert wide.sampled.tolist() == [0, 3, 0, 0]
    assert (wide.decodes, wide.sequences) == (1, 2)
    assert wide.lora is not None
    assert wide.lora.chunks.tolist() == [[0, 0, 1], [1, 1, 3], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    sent = StepBuffer(64, 4, CPU).send(wide, torch.zeros(4, 8), 2, MixLimits(8, 9, 2, 4))
    assert sent.attention.mix is not None
    assert sent.attention.mix.counts.tolist() == [1, 2, 2]
    assert sent.splits == 8  # the most, whatever this step has


@settings(max_examples=80)
@given(data=st.data())
def test_a_mixed_step_fits_the_graph_that_is_chosen_for_it(data: st.DataObject) -> None:
    running, slots = data.draw(st.sampled_from([(3, 1), (64, 64), (300, 5)]))
    most = data.draw(st.sampled_from([20, 256, 2048]))
    graphs, buffer = StepGraphs(running, most, slots, PlainReplay), StepBuffer(most, running, CPU)
    decodes = data.draw(st.integers(0, min(running, most) // 2))
    room = min(most - decodes, 300)
    chunks = data.draw(st.lists(st.integers(2, max(2, room // 4)), min_size=1, max_size=40))
    while chunks and (sum(chunks) > room or decodes + len(chunks) > running):
        chunks.pop()
    if not chunks:
        return
    step = mixed_step(decodes, chunks, data.draw(st.integers(0, min(slots, 12))))
    key = graphs.key_of(step)
    if key is None:
        assert len(step.tokens) > min(most, 256) or len(chunks) > 32
        return
    assert key in graphs.keys([16])
    wide = graphs.fit(step, key)
    assert len(step.tokens) <= len(wide.tokens) == key.tokens <= most
    assert len(step.table_rows) <= len(wide.table_rows) == key.sequences
    if wide.lora is not None and step.lora is not None:
        assert len(step.lora.chunks) <= len(wide.lora.chunks)
        assert len(wide.lora.chunks) == max_chunks(key.tokens, key.adapters, 16)
    # Equal sizes have equal addresses, whatever was sent before.
    sent = [
        buffer.send(each, torch.zeros(1, 1), 1, MixLimits(1, 1, 0, 1)).memory[1:]
        for each in (wide, graphs.fit(mixed_step(0, [2], int(key.adapters > 0)), key))
    ]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (mixed_step(10, [247]), "257 tokens"),
        (mixed_step(0, [2] * 33), "33 chunks"),
        (mixed_step(60, [2] * 5), "more sequences than may run"),
        (replace(mixed_step(2, [5]), sampled=np.zeros(0, np.int32)), "nothing is sampled"),
        (replace(mixed_step(2, [5]), sampled=np.zeros(65, np.int32)), "65 rows of logits"),
        (mixed_step(3, [5] * 9, 5), "more adapters than slots"),
    ],
)
def test_mixed_steps_without_a_graph(step: HostStep, why: str) -> None:
    graphs = StepGraphs(64, 2048, 4, PlainReplay)
    assert graphs.key_of(step) is None, why


def test_mixed_steps_with_adapters_of_experts_or_longer_chunks_have_no_graph() -> None:
    graphs, step = StepGraphs(64, 2048, 4, PlainReplay), mixed_step(3, [5], 2)
    assert step.lora is not None
    assert graphs.key_of(step) is not None
    inner = replace(step.lora, slots=np.zeros(len(step.tokens), np.int32))
    for lora in (inner, replace(step.lora, chunk_rows=64)):
        assert graphs.key_of(replace(step, lora=lora)) is None


def test_the_number_of_graphs_is_what_the_page_says() -> None:
    """With the settings' defaults."""
    config = EngineConfig(model="m")
    graphs = StepGraphs(
        config.max_running, config.max_batch_tokens, config.max_adapter_slots, PlainReplay
    )
    keys = graphs.keys([16, config.max_lora_rank])
    mixed = [key for key in keys if key.sequences]
    page = (Path(__file__).parents[3] / "engine" / "backends" / "gpu" / "README.md").read_text()
    assert f"{len(keys) - len(mixed)} graphs of decoding steps and {len(mixed)} with prompt" in page
    assert keys[0] == GraphKey(256, 0, 0, 64)


def test_a_graph_reads_the_memory_it_was_recorded_with() -> None:
    graphs, buffer = StepGraphs(4, 64, 2, PlainReplay), StepBuffer(8, 4, CPU)
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
