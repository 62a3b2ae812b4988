"""What an operator may ask of a running controller, and how it is asked and answered."""
