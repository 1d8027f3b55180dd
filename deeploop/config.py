"""Everything a run is made of: dataclasses, presets by name, checks at the door."""
