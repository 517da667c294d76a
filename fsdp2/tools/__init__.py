"""Tools for users, built on the core. The core never imports them."""
