module generator

go 1.19
