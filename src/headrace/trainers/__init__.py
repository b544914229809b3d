"""Front doors for the trainers of others: their loops, whose steps are planned."""
