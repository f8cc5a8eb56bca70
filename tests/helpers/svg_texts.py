"""Texts and tooltips of an SVG picture."""

from __future__ import annotations

from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    return ["".join(t.itertext()) for t in parsed(svg).iter(f"{SVG}text")]


def tooltips(svg: str) -> list[str]:
    return [t.text or "" for t in parsed(svg).iter(f"{SVG}title")]
