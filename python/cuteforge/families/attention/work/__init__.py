"""Which query rows meet which keys: sizes, bands, work tiles, and how the CTAs share them."""
