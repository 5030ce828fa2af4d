"""What does a model's name mean, and how does the model get onto this machine?"""
