"""`make demo`: a coordinator and an agent on one machine, real models, and a seam that moves while you watch."""
