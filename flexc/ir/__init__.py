"""What a program is: nodes, graphs, the op table, and what can be computed from them. Imports no other room."""
