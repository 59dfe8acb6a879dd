"""Parts that the core never imports: each folder may be removed, and everything else still works."""
