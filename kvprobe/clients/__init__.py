"""What do other programs get that ask a model here?"""
