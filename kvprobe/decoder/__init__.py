"""What does a decoder compute? One that can be read whole, with the weights of Hugging Face models."""
