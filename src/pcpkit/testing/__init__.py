"""Tools to test one's own kernels, layers and rank code; documented in docs/testing.md.

``strategies`` needs hypothesis (extra ``test``); ``poison``, ``compare`` and ``ranks`` need nothing
that pcpkit does not. No other part of pcpkit imports this package.
"""
