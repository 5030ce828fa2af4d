"""How is a small model trained?"""
