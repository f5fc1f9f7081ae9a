"""The length of audio files whose bytes are written here by the formats' own documents."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.serving.media.request import estimate_of, seconds_of
from tests.gateway.serving.test_media import wav


def flac(samples: int, rate_hz: int) -> bytes:
    """A STREAMINFO block: 20 bits of rate, 3 of channels, 5 of depth, 36 of samples."""
    packed = rate_hz << 44 | 1 << 41 | 15 << 36 | samples
    return b"fLaC" + b"\x80\0\0\x22" + b"\0" * 10 + packed.to_bytes(8, "big") + b"\0" * 16


def ogg(granule: int, head: bytes) -> bytes:
    def _page(position: int, body: bytes) -> bytes:
        return b"OggS\0\0" + struct.pack("<qIII", position, 1, 0, 0) + b"\1" + body

    return _page(0, bytes([len(head)]) + head) + _page(granule, b"\3abc")


def opus(samples: int) -> bytes:
    return ogg(samples + 312, b"OpusHead\1\2" + struct.pack("<HIh", 312, 16_000, 0) + b"\0")


def vorbis(samples: int, rate_hz: int) -> bytes:
    return ogg(samples, b"\1vorbis" + struct.pack("<IBI", 0, 2, rate_hz) + b"\0" * 14)


def mp3(frames: int) -> bytes:
    """MPEG-1 layer III, 128 kbit/s, 44,100 Hz, without padding: 417 bytes, 1,152 samples."""
    return b"ID3\4\0\0\0\0\0\5" + b"\0" * 5 + (b"\xff\xfb\x90\x64" + b"\0" * 413) * frames


def mp4(units: int, scale: int, version: int) -> bytes:
    head = b"\0\0\0\x18ftypM4A \0\0\0\0M4A isom"
    times = struct.pack(">QQIQ" if version else ">IIII", 0, 0, scale, units)
    return head + b"\0\0\0\x6cmoov\0\0\0\x64mvhd" + bytes([version, 0, 0, 0]) + times


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (wav(2.0), 2),
        (wav(2.001), 3),
        (wav(0.5, 48_000), 1),
        (wav(3)[:40] + b"\0\0\0\0" + wav(3)[44:], 3),  # a writer that did not know the size
        (wav(3)[:40] + b"\xff\xff\xff\xff" + wav(3)[44:], 3),
        (flac(44_100 * 90 + 1, 44_100), 91),
        (opus(48_000 * 5), 5),
        (vorbis(22_050 * 7, 22_050), 7),
        (mp3(100), 3),  # 115,200 samples: 2.61 s
        (mp4(61_500, 1_000, 0), 62),
        (mp4(120_000, 1_000, 1), 120),
    ],
)
def test_the_container_says_how_long_the_audio_is(data: bytes, seconds: int) -> None:
    assert seconds_of(data) == seconds


@pytest.mark.parametrize("data", [b"", b"RIFF", b"fLaC", b"OggS", b"\xff", b"\x1aE\xdf\xa3webm"])
def test_what_says_nothing_is_estimated(data: bytes) -> None:
    assert seconds_of(data) is None and estimate_of(data) == 1
    assert estimate_of(b"0" * 160_000) == 80


@settings(max_examples=60, deadline=None)
@given(
    head=st.sampled_from((wav(1), flac(9, 8_000), opus(9), vorbis(9, 8_000), mp3(2), mp4(9, 9, 1))),
    cut=st.integers(0, 120),
    noise=st.binary(max_size=40),
)
def test_no_bytes_break_it(head: bytes, cut: int, noise: bytes) -> None:
    found = seconds_of(head[:cut] + noise)
    assert found is None or 0 < found <= 86_400
