"""From measured steps to the numbers of a data sheet: which runs were measured, what is predicted of them, the fit."""
