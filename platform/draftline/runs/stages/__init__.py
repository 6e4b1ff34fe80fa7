"""The stages of a run, one module each: the driver's part, which hands work to actors and records what came back."""
