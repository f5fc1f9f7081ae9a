"""Names of blocks: nothing but the same tenant, weights, base, dtype and tokens gives the same."""

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.prefix import PrefixHasher, chain_root
from tests.engine.helpers import ask, make_config, make_engine, run_until_idle

TOKENS = list(range(1, 25))


def names(base: str = "base", dtype: str = "bf16", public: tuple = ()) -> PrefixHasher:
    return PrefixHasher(base, dtype, 4, public)


def keys_of(
    maker: PrefixHasher, tokens: list[int], tenant: str = "t", adapter: str | None = None
) -> list[bytes]:
    keys: list[bytes] = []
    maker.extend(keys, tokens, tenant, adapter, maker.public_blocks(tokens))
    return keys


def test_each_part_of_the_root_changes_every_key() -> None:
    every = [
        keys_of(names(), TOKENS),
        keys_of(names(), TOKENS, tenant="u"),
        keys_of(names(), TOKENS, adapter="ab"),
        keys_of(names(base="other"), TOKENS),
        keys_of(names(dtype="fp32"), TOKENS),
        keys_of(names(), [0, *TOKENS[1:]]),
    ]
    flat = [key for keys in every for key in keys]
    assert len(set(flat)) == len(flat) == 36


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_parts_do_not_collide_by_concatenation(one: list[str], two: list[str]) -> None:
    assert (chain_root("k", *one) == chain_root("k", *two)) == (one == two)


def test_an_adapter_named_like_a_tenant_is_not_that_tenant() -> None:
    a = keys_of(names(), TOKENS, tenant="x", adapter=None)
    b = keys_of(names(), TOKENS, tenant="", adapter="x")
    assert not set(a) & set(b)


def test_extending_later_gives_the_same_as_at_once() -> None:
    maker, keys = names(), []
    for end in range(len(TOKENS) + 1):
        maker.extend(keys, TOKENS[:end], "t", None, 0)
    assert keys == keys_of(maker, TOKENS)


def test_a_public_prefix_is_shared_up_to_its_last_whole_block() -> None:
    maker = names(public=(tuple(TOKENS[:10]),))  # two whole blocks of four
    one, two = keys_of(maker, TOKENS, "one"), keys_of(maker, TOKENS, "two")
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert not set(keys_of(maker, TOKENS, "one", "ab")) & set(one)


def test_tenants_share_a_public_prefix_and_nothing_after_it() -> None:
    public = tuple(range(500, 516))
    engine = make_engine(make_config(public_prefixes=(public,)))
    prompt = [*public, *range(1, 14)]
    for number, tenant in enumerate(["one", "two", "two"]):
        engine.submit(ask(f"r{number}", prompt, namespace=tenant), "g")
        found = run_until_idle(engine)
        expected = [0, 16, 28][number]
        assert found.receipts[f"r{number}"].cached == expected


def test_the_cache_follows_the_weights_not_the_slot(tmp_path: object) -> None:
    from tests.engine.helpers import write_adapter

    engine = make_engine()
    (path_a, a), (path_b, b) = write_adapter(tmp_path, "a"), write_adapter(tmp_path, "b")
    engine.load_adapter(path_a)
    engine.load_adapter(path_b)
    prompt = list(range(1, 22))
    cached = []
    for number, adapter in enumerate([None, a, b, a, b, None]):
        engine.submit(ask(f"r{number}", prompt, adapter=adapter), "g")
        cached.append(run_until_idle(engine).receipts[f"r{number}"].cached)
    assert cached == [0, 0, 0, 20, 20, 20]
