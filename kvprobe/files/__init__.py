"""How are files read and written, so that each is there whole or not at all?"""
