"""Lexical cues that split a head's score into OpenAI's sub-categories, which are marked weak.

A sub-category's score is its head's score times the strength of its cue; without a cue, a tenth.
"""

import re
from collections.abc import Sequence
from operator import itemgetter, mul
from typing import Final

from ahocorasick_rs import AhoCorasick

from moderation.categories import HEADS, PROMPT_ATTACK, SCORED

_NO_CUE_FACTOR: Final = 0.1

_THREAT = re.compile(
    r"\b(?:kill|murder|shoot|stab|hang|lynch|burn|gas|beat|hurt|exterminate|execute|rape|slaughter"
    r"|hunt(?:ing)? (?:you|them)|wipe (?:them|you)|deserves? to die|should (?:all )?die"
    r"|(?:i|we) ?(?:will|'ll|am going to|'m going to|gonna) (?:find|get|come for|end) (?:you|them))"
)
_MINORS = re.compile(
    r"\b(?:child(?:ren|ish)?|kids?|minors?|under-?age|toddler|infant|pre-?teens?|teen(?:age)?r?s?"
    r"|school ?(?:girl|boy)s?|lolita?|shota|little (?:girl|boy)s?|(?:[1-9]|1[0-7])[ -]?"
    r"(?:yo\b|y/o|years?[ -]old)|(?:five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen"
    r"|fifteen|sixteen|seventeen)[ -]years?[ -]old|(?:young|step) ?(?:daughter|son|niece|nephew))\b"
)
_GRAPHIC = re.compile(
    r"\b(?:blood(?:y|ied)?|gore|gory|guts|intestines?|entrails|organs?|skull|severed|dismember\w*"
    r"|decapitat\w*|behead\w*|mutilat\w*|disembowel\w*|eviscerat\w*|gouged?|flesh|corpses?|brains?"
    r"|slashed|screams?|screaming|limbs?|wounds?|torture[ds]?|torturing|rotting)\b"
)
_INTENT = re.compile(
    r"\b(?:i|i'm|i've|im|me|my|myself|i'd)\b.{0,80}\b(?:die|dead|kill|suicid\w*|end it|end my|cut"
    r"|cutting|starv\w*|disappear|overdose|hurt|harm|alive|live|jump|hang|purg\w*|pills?)\b",
    re.DOTALL,
)
_INSTRUCTIONS = re.compile(
    r"\b(?:how (?:to|do|can|many|much|long|would)|ways? to|methods?|steps?|instructions?|guide"
    r"|best way|easiest|painless(?:ly)?|dos(?:e|age)|tips|without (?:anyone|being|getting))\b"
)
_VIOLENT_MEANS = re.compile(
    r"\b(?:bombs?|explosives?|guns?|firearms?|weapons?|rifles?|pistols?|ammunition|grenades?"
    r"|silencers?|detonat\w*|molotov|poison\w*|ricin|sarin|anthrax|nerve agent|assassinat\w*"
    r"|murder\w*|kill\w*|attack\w*|shoot\w*|stab\w*|terroris\w*|kidnap\w*|tortur\w*|napalm|3d.print"
    r"|arson|mass casualt\w*|massacre)\b"
)

_CUES: Final = {
    "harassment/threatening": _THREAT,
    "hate/threatening": _THREAT,
    "illicit/violent": _VIOLENT_MEANS,
    "self-harm/intent": _INTENT,
    "self-harm/instructions": _INSTRUCTIONS,
    "sexual/minors": _MINORS,
    "violence/graphic": _GRAPHIC,
}
_HEADS_OF: Final = tuple((name, HEADS.index(name.partition("/")[0])) for name in SCORED)
_ATTACK: Final = HEADS.index(PROMPT_ATTACK)  # the last
# Each score without a cue: that of its head, and the factor.
_of_heads: Final = itemgetter(*[head for _, head in _HEADS_OF])
_WITHOUT_CUES: Final = tuple(_NO_CUE_FACTOR if name in _CUES else 1.0 for name, _ in _HEADS_OF)
# Each cue: the place of its score, and the head.
_PLACES: Final = tuple(
    (SCORED.index(name), HEADS.index(name.partition("/")[0]), cue) for name, cue in _CUES.items()
)
# Below this head score a sub-category is negligible and its cue is not searched for.
_MIN_HEAD_SCORE: Final = 0.1


# Every match of a cue contains one of its stems, of which these are lists.
_ALL_STEMS: Final = {
    _THREAT: "kill|murder|shoot|stab|hang|lynch|burn|gas|beat|hurt|exterminate|execute|rape|slaughter"
    "|hunt you|hunt them|hunting you|hunting them|wipe them|wipe you|deserve to die|deserves to die"
    "|should die|should all die|find you|find them|get you|get them|come for you|come for them"
    "|end you|end them",
    _MINORS: "child|kid|minor|underage|under-age|toddler|infant|teen|lolit|shota|y/o|daughter|niece"
    "|nephew|schoolgirl|school girl|schoolboy|school boy|little girl|little boy|youngson|young son"
    "|stepson|step son|year old|years old|year-old|years-old"
    + "".join([f"|{digit}{sign}yo" for digit in range(10) for sign in ("", " ", "-")]),
    _GRAPHIC: "blood|gore|gory|guts|intestine|entrails|organ|skull|severed|dismember|decapitat|behead"
    "|mutilat|disembowel|eviscerat|gouge|flesh|corpse|brain|slashed|scream|limb|wound|tortur|rotting",
    _INTENT: "die|dead|kill|suicid|end it|end my|cut|starv|disappear|overdose|hurt|harm|alive|live"
    "|jump|hang|purg|pill",
    _INSTRUCTIONS: "how to|how do|how can|how many|how much|how long|how would|way to|ways to|method"
    "|step|instruction|guide|best way|easiest|painless|dose|dosage|tips|without anyone|without being"
    "|without getting",
    _VIOLENT_MEANS: "bomb|explosive|gun|firearm|weapon|rifle|pistol|ammunition|grenade|silencer"
    "|detonat|molotov|poison|ricin|sarin|anthrax|nerve agent|assassinat|murder|kill|attack|shoot|stab"
    "|terroris|kidnap|tortur|napalm|print|arson|mass casualt|massacre",
}
_STEMS: Final = [(stem, cue) for cue, listed in _ALL_STEMS.items() for stem in listed.split("|")]
_finder = AhoCorasick([stem for stem, _ in _STEMS])


class PossibleCues:
    """The cues that a text may contain; it and its pieces need not be searched for the others.

    One pass finds the stems of all of them, wherever they stand in a word: a piece may begin or end
    within one. The search for one cue takes ten times as long.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: frozenset[int] | None = None  # by identity: a pattern's hash reads its code

    def __contains__(self, cue: re.Pattern[str]) -> bool:
        if self._found is None:
            matches = _finder.find_matches_as_indexes(self._text.lower(), overlapping=True)
            self._found = frozenset([id(_STEMS[at][1]) for at, _, _ in matches])
        return id(cue) in self._found


def openai_scores(
    row: Sequence[float], text: str, possible: PossibleCues | None = None
) -> dict[str, float]:
    """Return the thirteen scores and prompt_attack from the heads' scores of a folded text.

    `possible`: the possible cues of the longer text that this text is a piece of; else its own.
    """
    values = list(map(mul, _of_heads(row), _WITHOUT_CUES))
    if max(row[:_ATTACK]) >= _MIN_HEAD_SCORE:  # a prompt attack has no cues
        lowered = ""
        possible = possible or PossibleCues(text)
        for place, head, cue in _PLACES:
            if row[head] >= _MIN_HEAD_SCORE and cue in possible:
                lowered = lowered or text.lower()
                if cue.search(lowered):
                    values[place] = row[head]
    return dict(zip(SCORED, values, strict=True))
