"""How are files read, and written so that each appears whole or not at all?"""
