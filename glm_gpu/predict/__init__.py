"""How fast a model will be: from bytes, multiply-adds, rates and routing, before a weight is read."""
