"""What measured steps say about the costs they were planned with."""
