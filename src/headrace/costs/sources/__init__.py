"""Where costs come from: profiles, formulas of methods, data sheets of hardware."""
