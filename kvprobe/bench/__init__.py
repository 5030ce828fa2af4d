"""How fast and how large is it on this machine?"""
