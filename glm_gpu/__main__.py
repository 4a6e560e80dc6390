from glm_gpu.cli import main

main()
