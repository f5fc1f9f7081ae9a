"""A block that a step copies from is not given away before the copy was made."""

from pathlib import Path

from tests.engine.helpers import (
    ask,
    make_config,
    make_engine,
    reference,
    run_until_idle,
    write_adapter,
)


def test_an_adapter_is_not_loaded_over_it(tmp_path: Path) -> None:
    path, digest = write_adapter(tmp_path, "one", rank=20)  # 5 blocks
    engine = make_engine(make_config(num_blocks=24, cache_cap_blocks=1))
    engine.load_adapter(path)
    forked = [ask(f"f{n}", list(range(n, n + 8)), 3, n=2, temperature=1.0, seed=5) for n in (1, 20)]
    for request in forked:
        engine.submit(request, "g")
    engine.step()
    # The first choices end. Then only the others hold the last blocks, which are in the cache: each
    # copies its own, and the cap puts the first of them on the free list.
    for request in forked:
        engine.scheduler.stop(engine.requests[request.request_id].sequences[0])
    engine.submit(ask("adapted", [7] * 3, 2, adapter=digest), "g")
    found = run_until_idle(engine)
    for request in forked:
        assert found.tokens[request.request_id, 1] == reference(request, 1, 3)
