"""Define what all graph passes share: model classes, layouts, collectives, graph rewriting and checks."""
