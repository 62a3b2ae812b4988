"""Which live flows go where: pins, elephants and flow labels. Pure but for the generator that is passed in."""
