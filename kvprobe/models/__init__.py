"""What does a model's name mean, and how does the model come to this machine?"""
