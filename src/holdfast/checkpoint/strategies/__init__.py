"""What a version consists of and how files are rearranged: each strategy decides, none touches a store."""
