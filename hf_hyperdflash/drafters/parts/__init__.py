"""What drafters are built of. Reducers, heads and block attention are torch alone: serving engines run them, too."""
