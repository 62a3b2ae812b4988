"""The process that settles what was done when the controller cannot, or when nobody confirmed."""
