"""For users, on top of the core. The core never imports them."""
