"""The length of an audio file from its container, without decoding it.

WAV (RIFF), FLAC (RFC 9639), Ogg with Opus or Vorbis (RFC 3533, RFC 7845), MPEG audio layer III frames
(ISO/IEC 11172-3) and MP4 (ISO/IEC 14496-12).
"""

import struct
from collections.abc import Callable

_BYTES_A_SECOND = 2_000  # of a file of another form: 16 kbit/s, so that the estimate is rather long
_MOST_S = 24 * 3600
_MP3_KBIT = {  # by version: 3 is MPEG-1, the others MPEG-2 and 2.5
    3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_RATE = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


def seconds_of(data: bytes) -> int | None:
    """Whole seconds, a started one counted; None if the form is not known or says nothing."""
    for signature, at, measure in _FORMS:
        if data[at : at + len(signature)] == signature:
            try:
                return _whole(measure(data))
            except (struct.error, IndexError, ZeroDivisionError):
                return None
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return _whole(_mp3(data))
    return None


def estimate_of(data: bytes) -> int:
    """Seconds of a file whose form is not known."""
    return max(1, min(_MOST_S, -(-len(data) // _BYTES_A_SECOND)))


def _whole(measured: tuple[int, int] | None) -> int | None:
    """Of samples and their rate."""
    if measured is None or measured[0] <= 0 or measured[1] <= 0:
        return None
    return min(_MOST_S, -(-measured[0] // measured[1]))


def _wav(data: bytes) -> tuple[int, int] | None:
    at, block, rate = 12, 0, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        if name == b"fmt ":
            rate, _, block = struct.unpack_from("<IIH", data, at + 12)
        if name == b"data":
            # A writer that streams does not know the size, and states 0 or the largest number.
            there = len(data) - at - 8
            return ((min(size, there) or there) // block, rate) if block else None
        at += 8 + size + (size & 1)
    return None


def _flac(data: bytes) -> tuple[int, int]:
    packed = int.from_bytes(data[18:26], "big")
    return packed & ((1 << 36) - 1), packed >> 44


def _ogg(data: bytes) -> tuple[int, int] | None:
    last = data.rfind(b"OggS")
    granule = struct.unpack_from("<q", data, last + 6)[0]
    opus = data.find(b"OpusHead", 0, 512)
    if opus >= 0:
        skipped = struct.unpack_from("<H", data, opus + 10)[0]
        return granule - skipped, 48_000
    vorbis = data.find(b"\x01vorbis", 0, 512)
    return (granule, struct.unpack_from("<I", data, vorbis + 12)[0]) if vorbis >= 0 else None


def _mp4(data: bytes) -> tuple[int, int] | None:
    at = data.find(b"mvhd")
    if at < 0:
        return None
    if data[at + 4] == 1:
        rate, length = struct.unpack_from(">IQ", data, at + 24)
    else:
        rate, length = struct.unpack_from(">II", data, at + 16)
    return length, rate


def _mp3(data: bytes) -> tuple[int, int] | None:
    at, samples, rate = 0, 0, 0
    if data[:3] == b"ID3" and len(data) >= 10:
        size = 0
        for byte in data[6:10]:
            size = size << 7 | byte & 0x7F
        at = 10 + size
    while at + 4 <= len(data):
        frame = _mp3_frame(data, at)
        if frame is None:
            if samples:
                break
            at += 1
            continue
        length, count, rate = frame
        samples += count
        at += length
    return (samples, rate) if samples else None


def _mp3_frame(data: bytes, at: int) -> tuple[int, int, int] | None:
    """(bytes, samples, samples a second) of the frame that begins here."""
    if data[at] != 0xFF or data[at + 1] & 0xE6 != 0xE2:  # layer III
        return None
    version, third = data[at + 1] >> 3 & 3, data[at + 2]
    bitrate, speed, padding = third >> 4, third >> 2 & 3, third >> 1 & 1
    if version == 1 or bitrate in (0, 15) or speed == 3:
        return None
    kbit = _MP3_KBIT[3 if version == 3 else 2][bitrate]
    rate, samples = _MP3_RATE[version][speed], 1152 if version == 3 else 576
    return samples // 8 * kbit * 1000 // rate + padding, samples, rate


_FORMS: tuple[tuple[bytes, int, Callable[[bytes], tuple[int, int] | None]], ...] = (
    (b"WAVE", 8, _wav),
    (b"fLaC", 0, _flac),
    (b"OggS", 0, _ogg),
    (b"ftyp", 4, _mp4),
)
