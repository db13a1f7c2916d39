"""What is particular to Qwen2.5-VL: image embeddings, 3-D positions, the dummy image of a rank without images."""
