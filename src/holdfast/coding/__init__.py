"""Where rows lie, and the codes that protect them."""
