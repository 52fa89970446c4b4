@tool
@icon("res://addons/envmanager/icons/training.svg")
class_name EnvManagerTraining
extends Resource
## How this game is trained: how long, in how many copies, who learns when, and the parameters of its episodes.
##
## The field `training` of the arena refers to it. A field that is left as it is here leaves the choice to the trainer.
## A config of the training wins over the scene.

const Parameter := preload("res://addons/envmanager/parameter.gd")

## How many steps of agents the training takes. 0: 100000.
@export_range(0, 10000000, 1000, "or_greater") var steps := 0
## The same seed repeats the training, if it waits for all engines.
@export_range(0, 1000, 1, "or_greater") var random_seed := 0
@export_group("Copies")
## How many copies of the scene play. 0: 1.
@export_range(0, 256, 1, "or_greater") var environments := 0
## How many engines play them. 0: 1.
@export_range(0, 16, 1, "or_greater") var engines := 0
## How many ticks of the physics an action lasts. 0: 4.
@export_range(0, 60, 1, "or_greater") var ticks_per_action := 0
## Which engines the trainer waits for in each step: any of them, or all.
@export_enum("any", "all") var wait := ""
## Whether info() of the agents travels. Lessons that end by a number of it need this.
@export var infos := false
@export_group("Rounds")
## How many steps of every environment a round lasts, in which the same behaviors learn. 0: no rounds.
@export_range(0, 1024, 1, "or_greater") var round_steps := 0
## Who learns in each round: ["hero", "hero", "target"]; "hero, target" for both.
@export var round_learners := PackedStringArray()
@export_group("Checkpoints")
## How many steps of agents lie between checkpoints. 0: there is one at the end.
@export_range(0, 1000000, 1000, "or_greater") var checkpoint_every := 0
## How many episodes are played at the end to judge the policies. -1: 100.
@export_range(-1, 1000, 1, "or_greater") var evaluation_episodes := -1
@export_group("Parameters")
## What the game reads by the arena's parameter(), and how each episode draws it.
@export var parameters: Array[Parameter] = []
@export_group("More")
## Any other options of the table `training` of a config, by their names: {"keep": 10}.
@export var more := {}
## Any other options of its table `manager`: {"engine": {"isolate": true}}.
@export var manager := {}
