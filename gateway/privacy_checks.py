"""Checksums and shapes that tell an identity number from any other run of digits. Pure."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv6Address

ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
"""GB 11643-1999: weights of the first 17 digits of a resident identity number."""

ID_CHECK = "10X98765432"

MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 FO18 "
    "FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 "
    "MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 "
    "SM27 TN24 TR26 UA29 VA22 VG24 XK20"
)
IBAN_CHARACTERS: dict[str, int] = {item[:2]: int(item[2:]) for item in _LENGTHS.split()}
"""Length of an account number by country (ISO 13616 registry)."""


def luhn(digits: str) -> bool:
    """ISO/IEC 7812-1, annex B: whether the last digit fits the others."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit)
        if place % 2:
            value = 2 * value - 9 if value > 4 else 2 * value
        total += value
    return total % 10 == 0


def card(digits: str) -> bool:
    """Whether `digits` can be a payment card: 13 to 19 digits of a known network, with a right check digit."""
    return 13 <= len(digits) <= 19 and digits[0] in "23456" and len(set(digits)) > 1 and luhn(digits)


def resident_id(text: str) -> bool:
    """Whether 18 characters are a Chinese resident identity number: region, a real birthday, the check character."""
    if len(text) != 18 or not text[:17].isdigit() or text[0] not in "12345678":
        return False
    year, month, day = int(text[6:10]), int(text[10:12]), int(text[12:14])
    if not (1850 <= year <= 2100 and 1 <= month <= 12 and 1 <= day <= MONTH_DAYS[month - 1]):
        return False
    total = sum(weight * int(digit) for weight, digit in zip(ID_WEIGHTS, text, strict=False))
    return ID_CHECK[total % 11] == text[17].upper()


def social_security(digits: str) -> bool:
    """Whether nine digits can be a US social security number; it has no check digit, only ranges never given out."""
    area, group, serial = digits[:3], digits[3:5], digits[5:]
    return len(digits) == 9 and area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def iban(text: str) -> bool:
    """Whether `text` (no spaces, upper case) is an account number: its country's length, and 1 modulo 97."""
    if IBAN_CHARACTERS.get(text[:2]) != len(text):
        return False
    moved = text[4:] + text[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def ipv4(text: str) -> bool:
    """Whether a dotted quad is an address that says something of a host: not loopback, mask or wildcard."""
    parts = [int(part) for part in text.split(".")]
    return all(part <= 255 for part in parts) and parts[0] not in (0, 127, 255)


def ipv6(text: str) -> bool:
    """Whether `text` is an IPv6 address other than `::` and `::1`."""
    if "::" not in text and text.count(":") != 7:
        return False
    try:
        address = IPv6Address(text)
    except AddressValueError:
        return False
    return int(address) > 1
