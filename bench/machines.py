"""GLM-5.2 on the machines that ship with the package, as `glm-gpu simulate` predicts it; bench/results/machines.json.

python bench/machines.py
"""

import record

from glm_gpu.opening import EngineOptions
from glm_gpu.predict.machines import open_machine, shipped_machines
from glm_gpu.predict.prediction import Workload
from glm_gpu.predict.simulation import simulate
from glm_gpu.report_predict import simulation_document, simulation_text


def main() -> None:
    documents = []
    for name in shipped_machines():
        machine = open_machine(name)
        simulation = simulate(machine, EngineOptions(), Workload())
        documents.append(simulation_document(machine, simulation))
        print(simulation_text(machine, simulation), end="\n\n")
    record.save("machines", {"machines": documents})


if __name__ == "__main__":
    main()
