"""Train `glm-tiny`: text, tokenizer, model, objective, optimiser, evaluation and export."""
