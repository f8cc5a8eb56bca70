"""The representation that passes share: model classes, layouts, collectives, rewriting, checks."""
