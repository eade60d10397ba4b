"""How long a sync takes on clusters that nobody has tried: costs fitted to records, and checked."""
