"""Pictures of a plan as SVG."""

from __future__ import annotations
