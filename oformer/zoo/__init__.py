"""The trained operators that come with the package: their cards, adding and verifying them, and tables of them."""
