extends "res://addons/envmanager/agent.gd"
## The one who is chased: it stands still or goes in one of four directions, faster than the hero.

const WIDTH := 400.0
const SPEED := 320.0
const HERO_SPEED := 200.0
const MOVES := [Vector2.ZERO, Vector2.RIGHT, Vector2.DOWN, Vector2.LEFT, Vector2.UP]

var move := 0

@onready var body: Node2D = get_parent()
@onready var hero: Node = $"../../Hero/Agent"


func begin_at(start: Vector2) -> void:
	body.position = start
	move = 0


func observe() -> PackedFloat32Array:
	var at := body.position / WIDTH
	var from: Vector2 = hero.body.position / WIDTH - at
	var speed: Vector2 = hero.velocity / HERO_SPEED
	return PackedFloat32Array([from.x, from.y, speed.x, speed.y, 2 * at.x - 1, 2 * at.y - 1])


func act(_continuous: PackedFloat32Array, discrete: PackedInt32Array) -> void:
	move = discrete[0]


# Straight away from the hero, into a corner in the end.
func heuristic() -> void:
	var away: Vector2 = body.position - hero.body.position
	var best := 3 if away.x < 0 else 1
	if absf(away.y) > absf(away.x):
		best = 4 if away.y < 0 else 2
	act(PackedFloat32Array(), PackedInt32Array([best]))


func _physics_process(delta: float) -> void:
	var next: Vector2 = body.position + MOVES[move] * SPEED * delta
	body.position = next.clamp(Vector2.ZERO, Vector2(WIDTH, WIDTH))
